from simulation.planting import MISTAKES
