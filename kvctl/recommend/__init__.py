"""From a model, hardware and a workload to a configuration: what could be run, what fits, how fast it is, and which is best."""
