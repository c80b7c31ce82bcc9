"""Commands of the lab, entry points of the group `trimtab.commands`: `trimtab` loads a module when it is called."""
