"""Search techniques and planners, one a module, all behind one ask/tell interface."""
