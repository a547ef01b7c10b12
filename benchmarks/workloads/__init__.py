"""Workloads of benchmarks, for a checkout: ``farflung train --workload benchmarks.workloads.aid:mobilenet``.

Each module has its data sets too: ``farflung data fetch benchmarks.workloads.svhn:SOURCE``.
"""
