"""Jobs to tune whose times do not follow Sirtaki's simulator: by different physics, formulas, or recorded sweeps."""
