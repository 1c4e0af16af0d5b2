"""The worker: model execution and the process around it. Importing the package (which is before torch, everywhere) sets how
long an OpenMP thread spins at a barrier before it sleeps, unless the environment says so already.

The worker shares its cores with the gateway and whatever else runs. By default libgomp spins for milliseconds; with one other
busy process on two cores a decode step then took 3 s, against about 0.1 s with this setting; on an idle machine it costs a
few percent. Reference: libgomp manual, GOMP_SPINCOUNT.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
