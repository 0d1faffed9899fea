"""The papers' laboratory: tasks, policies, methods, training, figures and reports.

Data flows  tasks + policies + methods -> train -> summary -> figures, report.
Needs the extra `lab`: pip install 'kondo[lab]'.
"""
