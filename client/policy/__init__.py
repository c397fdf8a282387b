"""What a site allows, whatever the coordinator asks."""
