"""The parts of the schedule explorer. Its interface is `proof.explore`."""
