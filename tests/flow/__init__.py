"""Real worker processes, and what happens when they are killed, stopped, frozen or cut off."""
