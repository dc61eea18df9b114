"""Jobs to tune. Their times do not come from Sirtaki's own simulator: different physics, formulas, recorded sweeps."""
