"""`fairlane policy simulate`: a policy file, a workload, and what would have come of it. The simulator is scheduler/simulator/;
here are the file formats, the tables and the picture around it."""
