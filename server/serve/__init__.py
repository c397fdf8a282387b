"""`umbel serve`: the command, the process, the application and what it does from time to time."""
