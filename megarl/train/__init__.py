"""Megatron's home: one policy, split over ranks, updated a step at a time. Nobody else imports megatron.

`rank.TrainerRank` is the door. It knows no Ray, no SGLang and no recipe beyond the sections it is given.
"""
