import pytest

# Their assertions show what differs, as those of a test do.
pytest.register_assert_rewrite(
    "block_manager_machine", "event_replay", "slot_content", "naive_manager"
)
