"""Tools that no job needs: `sm-launch local`, doctor, stacks, timeline.

The file of that name shows each tool in one screen; all use the launcher's modules.
"""
