"""Tools beside the launcher, which no job needs: `sm-launch local`, doctor, stacks, timeline.

The file of that name is the whole of each in one screen; all use the launcher's modules.
"""
