"""The worker's side of `rollq bench`: what must import the workers. See `producer/bench`."""
