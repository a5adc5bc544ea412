"""What agents need between calls: sessions with one budget, and answers of steps that came up before."""
