"""Jobs to tune whose times do not come from Sirtaki's own simulator: other physics, formulas, recorded sweeps."""
