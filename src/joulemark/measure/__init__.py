"""How a case is measured: passes, stopping, the loop, and the door to a fresh process."""
