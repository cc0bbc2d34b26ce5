"""Where each array of a state is stored: meshes, the table of parameters, stacks, slices, stages.

Makes no array.
"""
