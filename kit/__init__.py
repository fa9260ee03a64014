"""kit: the package behind the notebooks. Importing it loads neither torch nor NumPy."""

try:
    from cluster.site import Site
    from kit.launcher import launch, resume
    from kit.plan import Plan
    from kit.recipe import Recipe
    from kit.run import Run
    from kit.spec import FlopBasis, ModelSpec
except Exception as error:
    from cluster.shadows import explain

    explain(error)
    raise

__all__ = ["FlopBasis", "ModelSpec", "Plan", "Recipe", "Run", "Site", "launch", "resume"]
