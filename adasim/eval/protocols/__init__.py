"""The published protocols as functions of tensors: k-NN, linear, few-shot, linear segmentation.

Nothing here opens data, prints or knows encoders.
"""
