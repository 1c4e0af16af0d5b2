"""`fairlane calibrate`: how long this machine's steps take, measured (sweep.py) or as a worker wrote them down (recorded.py).
The fit itself is fairlane.scheduler.simulator.fit's."""
