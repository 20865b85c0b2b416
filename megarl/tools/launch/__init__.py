"""Jobs for schedulers, rendered from a recipe. Text only: nothing here starts anything."""
