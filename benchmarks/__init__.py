"""What things cost, beside what else they could be done with. `README.md` says how to run it."""
