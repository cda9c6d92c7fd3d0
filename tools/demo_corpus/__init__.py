"""The parts of the demo corpus: draws, words, and one family of modules for each kind of document.

1. In: a seed, and the sentences and code written by hand in these modules.
2. `dice` draws and fills in templates; `words` holds the shared vocabulary.
3. Out: `prose.write`, `code.write` and `dialogue.write`, each a text of about a wanted number of characters.
4. They know nothing of files and ids, which are the business of `make_demo_corpus.py`, nor of tokenmill.
"""
