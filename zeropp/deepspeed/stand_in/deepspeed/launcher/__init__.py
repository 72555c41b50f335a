"""Names of DeepSpeed's launcher that other libraries import."""
