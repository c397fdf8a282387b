"""A site's one long-lived process: it takes part in every run that the site allows, each in a process of its own."""
