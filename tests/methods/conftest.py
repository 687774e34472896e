"""The full-size steps take gigabytes and tens of seconds: whatever else fails should fail before them."""


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name == "test_full_size.py")
