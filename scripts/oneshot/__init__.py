"""The report runner: it starts the stages, keeps what they prove and packs the bundle.

Standard library only (jinja2 and matplotlib where the report is rendered, NVML where it is
installed); never torch, so that a machine whose torch does not import gets its report.
"""
