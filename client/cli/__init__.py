"""The command line of sites, operators, auditors and officers."""
