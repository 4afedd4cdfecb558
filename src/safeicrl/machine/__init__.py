"""What training and acting run on: devices, processes, signals, kept programs, and clocks of who was busy."""
