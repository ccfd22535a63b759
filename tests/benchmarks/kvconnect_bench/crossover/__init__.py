"""Measures hits at stores of every speed: ``kvconnect bench crossover``."""
