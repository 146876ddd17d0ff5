"""Graphs of aten ops that a program was traced to: opened in their sizes, cut into halves, made cheaper."""
