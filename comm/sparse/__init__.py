"""How sparse gradients travel: rows and their numbers, over streams of their own."""
