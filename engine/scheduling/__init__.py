"""The parts of the scheduler: the plan of a step, its token budget, the order of waiting, fair shares, twins."""
