"""What engines and exporters write on their pages, read the same way by every service: families, units, labels."""
