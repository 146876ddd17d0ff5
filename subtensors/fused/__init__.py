"""`st.fused`: single-tensor math over whole lists, eagerly and in compiled graphs."""
