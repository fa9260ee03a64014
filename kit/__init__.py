"""The names of the kit that most notebooks use. Importing them loads neither torch nor NumPy."""

try:
    from cluster.site import Site
    from kit.config.plan import Plan
    from kit.config.recipe import Recipe
    from kit.config.spec import FlopBasis, ModelSpec
    from kit.launcher import launch, resume
    from kit.run import Run
except Exception as error:
    from cluster.shadows import explain

    explain(error)
    raise

__all__ = ["FlopBasis", "ModelSpec", "Plan", "Recipe", "Run", "Site", "launch", "resume"]
