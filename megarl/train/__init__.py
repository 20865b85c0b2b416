"""The trainer's ranks. The only package that imports megatron; it knows no Ray, no SGLang and no whole recipe.

`actor.ActorRank`, `critic.CriticRank` and `frozen.ReferenceRank` are its entry points.
"""
