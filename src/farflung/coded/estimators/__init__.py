"""Coded training in scikit-learn's conventions: one file for each estimator."""

from farflung.extras import need

need("farflung.coded.estimators", "sklearn", extra="sklearn")

from farflung.coded.estimators.linear_svc import CodedLinearSVC
from farflung.coded.estimators.logistic_regression import CodedLogisticRegression

__all__ = ["CodedLinearSVC", "CodedLogisticRegression"]
