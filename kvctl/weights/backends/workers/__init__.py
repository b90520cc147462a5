"""What runs in backends' environments: files that are started by their paths, and import nothing of kvctl."""
