"""One federated round: its states, the machine that moves it, and who is invited, weighed and asked again."""
