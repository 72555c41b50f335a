"""Float16."""
