"""The parts of the schedule explorer; what is meant for use is in `proof.explore`."""
