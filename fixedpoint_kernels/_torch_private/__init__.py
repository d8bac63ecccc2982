"""What torch does not offer publicly: the only folder of these packages that uses its private names.

Each entry says which public way is missing. The tests name what is gone after an update of torch.
"""
