"""Plans: the recipe with which a network reaches a target first."""
