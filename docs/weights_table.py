"""Print the table of the models that ship with the package, as Markdown, from their cards.

python docs/weights_table.py
"""

from equipoise.lab.results.weights_page import weights_table

if __name__ == "__main__":
    print(weights_table(), end="")
