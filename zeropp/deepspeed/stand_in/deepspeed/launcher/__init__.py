"""What launchers of other libraries ask of DeepSpeed's."""
