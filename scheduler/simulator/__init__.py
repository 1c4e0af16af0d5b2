"""The simulator: the real scheduler, policies and block accounting on a clock that only steps move. docs/simulator.md says what
it is for; what is modelled instead of done is the model's step (step_time.py, executor.py), the network and the requests."""
