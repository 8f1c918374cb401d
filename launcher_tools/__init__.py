"""Tools beside the launcher, which a job does not need: `sm-launch local`, `sm-launch doctor`.

local.py and doctor.py are each the whole of one in one screen; both use the launcher's modules.
"""
