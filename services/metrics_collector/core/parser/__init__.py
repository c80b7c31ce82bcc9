"""Takes a page of metrics apart: its layout, the plan of what is read, and rows."""
