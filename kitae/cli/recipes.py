"""`kitae recipes`."""

from kitae.config.measured import by_hardware, measurements, told
from kitae.config.recipe import shipped_chains, shipped_recipes, summary


def recipes() -> None:
    """List the recipes that come with Kitae."""
    for recipe in shipped_recipes():
        print(f"{recipe.stem:18} {summary(recipe)}")
        for runs in by_hardware(measurements(recipe.stem)):
            print(f"{'':18} measured: {told(runs)}")
    print("\ntrain one with: kitae train NAME [section.key=value …]\n")
    for chain in shipped_chains():
        print(f"{chain.stem:18} {summary(chain)}")
    print("\nrun one with: kitae chain NAME")
