"""What pools and scaled services share: measurements as seen, the words of decisions, drafts."""
